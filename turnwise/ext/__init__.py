"""What plugs into the core: environments, programs, frameworks, checks and the report."""
