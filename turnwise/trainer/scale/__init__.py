"""Planning: memory, throughput and layout of a run on a cluster, by formulas, without loading anything."""
