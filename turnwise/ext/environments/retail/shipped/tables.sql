CREATE TABLE users (user_id TEXT PRIMARY KEY, first_name TEXT NOT NULL, last_name TEXT NOT NULL,
    email TEXT NOT NULL UNIQUE, street TEXT NOT NULL, city TEXT NOT NULL, state TEXT NOT NULL, zip TEXT NOT NULL);
CREATE TABLE payment_methods (payment_id TEXT PRIMARY KEY, user_id TEXT NOT NULL REFERENCES users,
    kind TEXT NOT NULL, last_four TEXT, balance INTEGER CHECK (balance >= 0));
CREATE TABLE products (product_id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE variants (item_id TEXT PRIMARY KEY, product_id TEXT NOT NULL REFERENCES products, options TEXT NOT NULL,
    price INTEGER NOT NULL, stock INTEGER NOT NULL CHECK (stock >= 0));
CREATE TABLE orders (order_id TEXT PRIMARY KEY, user_id TEXT NOT NULL REFERENCES users,
    status TEXT NOT NULL CHECK (status IN ('pending', 'shipped', 'delivered', 'cancelled')),
    street TEXT NOT NULL, city TEXT NOT NULL, state TEXT NOT NULL, zip TEXT NOT NULL, cancel_reason TEXT,
    items_changed INTEGER NOT NULL DEFAULT 0);
CREATE TABLE order_items (order_id TEXT NOT NULL REFERENCES orders, item_id TEXT NOT NULL REFERENCES variants,
    price INTEGER NOT NULL, state TEXT NOT NULL DEFAULT 'ordered'
    CHECK (state IN ('ordered', 'cancelled', 'returned', 'exchanged')),
    new_item_id TEXT REFERENCES variants, new_price INTEGER,
    CHECK ((state = 'exchanged') = (new_item_id IS NOT NULL AND new_price IS NOT NULL)));
CREATE TABLE payments (order_id TEXT NOT NULL REFERENCES orders, payment_id TEXT NOT NULL REFERENCES payment_methods,
    kind TEXT NOT NULL CHECK (kind IN ('payment', 'refund')), amount INTEGER NOT NULL CHECK (amount > 0));
CREATE TABLE declined (order_id TEXT NOT NULL REFERENCES orders, reason TEXT NOT NULL, UNIQUE (order_id, reason));
CREATE TABLE transfers (user_id TEXT NOT NULL REFERENCES users, topic TEXT NOT NULL);
CREATE INDEX orders_of_users ON orders (user_id);
CREATE INDEX items_of_orders ON order_items (order_id);
CREATE INDEX payments_of_orders ON payments (order_id);
CREATE INDEX variants_of_products ON variants (product_id);
