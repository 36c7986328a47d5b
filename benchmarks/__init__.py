"""Speed and memory of lipcert, as ratios measured side by side in one run."""
