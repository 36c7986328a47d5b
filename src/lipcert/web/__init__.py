"""A classifier as a web page: it runs in the browser, and no request leaves the page."""

from lipcert.web.site import write_site

__all__ = ["write_site"]
