"""The gateway: the wire APIs that foreign agents speak, on top of a recorder.

One dialect a file (``openai_chat.py``, ``openai_responses.py``, ``anthropic.py``): a body to a request in this
package's own words, an answer to a body or to a stream of events. No dialect knows a token id.
"""
