"""An embedding on the host, of which a batch's rows alone are copied to the device."""
