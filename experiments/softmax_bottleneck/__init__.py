"""What the softmax bottleneck costs, in nats."""
