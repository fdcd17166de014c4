"""torch's side: training state to leaves, leaves to the snapshot, and back. The only place that knows tensors' memory."""
