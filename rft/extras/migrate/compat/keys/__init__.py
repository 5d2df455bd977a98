"""What related tools call the keys of a configuration."""
