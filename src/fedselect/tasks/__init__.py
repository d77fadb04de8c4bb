"""What a model's outputs and a sample's target mean: losses and metrics."""
