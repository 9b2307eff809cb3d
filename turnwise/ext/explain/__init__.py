"""Why a run does not learn: what it recorded, rules that read it, and findings in the order of causes."""
