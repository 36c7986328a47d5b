"""From norms to Lipschitz constants."""
