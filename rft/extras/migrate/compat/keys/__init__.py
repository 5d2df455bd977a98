"""What related tools call the keys of a configuration.  `rft.config.foreign` finds these files as
built-in plugins are found.
"""
