"""Pages from one node's memory to another's, by Mooncake's Transfer Engine."""
