"""Quality beside the simplest tools that do the same job, see __main__.py."""
