"""The host fabric: the ranks are processes of one machine and share memory."""
