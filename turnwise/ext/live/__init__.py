"""Learning from use: a gateway that serves users, whose consented sessions with feedback train the policy."""
