"""Tools that work in the episode's sandbox: shell, Python, editor, patches."""
