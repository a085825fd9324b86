"""Engines that the adapter meets: one module or folder each, and none imports another."""
