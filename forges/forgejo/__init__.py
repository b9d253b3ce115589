"""Forgejo, and Gitea, which has the same tables."""
