"""The recorder: sessions that turn messages into exact tokens and keep every one of them."""
