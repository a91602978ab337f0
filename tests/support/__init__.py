"""What tests share: jobs, hosts, servers, and code that plays a user's. Tests import it; it imports no test."""
