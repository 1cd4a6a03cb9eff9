"""The page of results: what it says (content, series, language), and how it looks (page.html, page.css, glue.js)."""
