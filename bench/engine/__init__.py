"""``cachebench engine``: what receiving a gigabyte costs, client library by client library."""
