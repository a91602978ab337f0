"""Shared code of tests: jobs, hosts, servers, and code that stands for a user's. Imports no test."""
