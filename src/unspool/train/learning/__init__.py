"""What is computed in a step of training: forward, loss, gradients, weights."""
