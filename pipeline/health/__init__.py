"""Health checks that detect a faulty machine within a minute and report why."""
