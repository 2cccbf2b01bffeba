"""Whether the number of shards of the vocabulary changes what a model learns and says."""
