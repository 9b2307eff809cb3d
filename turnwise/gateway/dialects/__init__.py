"""Dialects, the gateway's wire APIs: OpenAI Chat Completions, OpenAI Responses, Anthropic Messages."""
