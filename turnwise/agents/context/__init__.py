"""Context management: dropping tool results, compaction and sub-agents; each starts a fork in the session."""
