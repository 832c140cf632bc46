found=$(rftstream status "$RFTSTREAM_CONFIG" --json)
case $? in
  0) ;;
  2) found="" ;; # there is none yet
  *) exit 3 ;;
esac
case $found in
  *'"state": "finished"'*)
    echo "this run has ended, and a release is one run: install another release, with another run.name" >&2
    exit 2
    ;;
esac
exec rftstream run --no-workers
