"""Every default, as Hydra YAML, one group a concern."""
