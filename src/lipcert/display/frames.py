"""Numbers for pandas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lipcert.errors import OptionError

if TYPE_CHECKING:
    import pandas


def data_frame(
    columns: Mapping[str, Any], index: str | None = None
) -> pandas.DataFrame:
    """A pandas DataFrame of the columns, one of which may be its index."""
    try:
        # lipcert does not depend on it: tables and figures do without.
        import pandas
    except ImportError:
        raise OptionError(
            "to_pandas needs pandas, which is not installed: pip install pandas"
        ) from None
    frame = pandas.DataFrame(dict(columns))
    if index is None:
        return frame
    return frame.set_index(index)
