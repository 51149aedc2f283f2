"""The page: a web UI in plain JavaScript and CSS, served without a build step."""
