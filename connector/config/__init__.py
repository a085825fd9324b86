"""Configuration files as every part of the project reads them: strict YAML, and refusals by line.

Schemas live with their users.
"""
