"""Tools that work in the sandbox of an episode: a shell, Python, an editor, patches."""
