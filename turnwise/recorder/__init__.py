"""The recorder: sessions that turn messages into exact token ids and record each of them."""
