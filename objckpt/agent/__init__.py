"""The uploader: a process of its own for each rank (or a thread), which outlives the trainer until the save is settled."""
