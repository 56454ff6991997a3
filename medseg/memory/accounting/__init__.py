"""Memory accounting: bytes of a training step or a forward pass, counted on tensors of known sizes."""
