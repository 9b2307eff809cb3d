"""The wire APIs of the gateway: OpenAI Chat Completions, OpenAI Responses, Anthropic Messages."""
