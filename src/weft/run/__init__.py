"""A Plan on a Fabric: agreement of the ranks, the executor, recording, and what to say about it."""
