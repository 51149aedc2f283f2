"""Scaling beyond one machine: server replicas and batch jobs on Ray."""
