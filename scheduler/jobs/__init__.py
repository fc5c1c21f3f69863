"""Durable batch jobs: files, batches and their lines, shared by every server on one database."""
