"""Norms of the linear maps between sites: estimates from below, certified upper bounds."""
