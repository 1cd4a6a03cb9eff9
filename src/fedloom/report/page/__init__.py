"""The page of results: its content (content, series, language), and its appearance (page.html, page.css, glue.js)."""
