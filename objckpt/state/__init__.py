"""torch's side: training state to leaves, leaves to the snapshot, and back. It alone knows tensors' memory."""
