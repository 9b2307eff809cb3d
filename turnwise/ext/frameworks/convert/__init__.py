"""Configurations of other trainers, translated: ``turnwise convert-config``."""
