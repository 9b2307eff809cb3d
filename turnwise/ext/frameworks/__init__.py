"""Other frameworks: their environments here, environments of ours there, agents written for them, and MCP."""
