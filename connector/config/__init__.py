"""Configuration files as every part of the project reads them: strict YAML with lines.

Schemas live with their users.
"""
