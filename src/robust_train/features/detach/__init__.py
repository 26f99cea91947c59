"""Jobs in the background, where a logout does not end them (``detach=true``)."""
