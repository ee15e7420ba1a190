"""Plans: the tasks of every rank as pure data, one lowering per operation, and their proof."""
