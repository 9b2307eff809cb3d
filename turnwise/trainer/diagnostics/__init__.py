"""What a run says about itself: where trainer and server disagree, what was not trained and why, and warnings."""
