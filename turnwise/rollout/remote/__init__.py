"""Agents that run elsewhere: the hub beside a run, and the runners that take its episodes."""
