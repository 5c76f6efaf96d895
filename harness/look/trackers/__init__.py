"""W&B, MLflow, TensorBoard and Prometheus as renderings of facts."""
