#!/bin/bash
# compute-sanitizer over one launch of each kind of the Hopper kernel, on small and odd shapes. From the repository's root.
# The first pass compiles; the tools then find the kernels in Triton's cache.
# racecheck also sees the words by which Triton's own dispatch hands partitions to warps, written before and read after a
# barrier of the whole block: their hazards are on the lines of the kernel's head and of warp_specialize, and are counted
# apart. One on any other line fails.
set -u
export PYTHONPATH=.
kernel=forge_megatron/kernels/hopper_kernel.py
head=$(grep -n "^def hopper_wgrad_step_kernel" $kernel | cut -d: -f1)
dispatch="$((head - 1))|$head|$(grep -n "gl.warp_specialize(" $kernel | cut -d: -f1)"
failed=0
python3 recipes/bench/sanitize.py || exit 1
for tool in memcheck racecheck synccheck; do
  report="${TMPDIR:-/tmp}/sanitize_$tool.txt"
  timeout "${SECONDS_A_TOOL:-120}" compute-sanitizer --tool $tool --error-exitcode 9 --print-limit 1000 \
    python3 recipes/bench/sanitize.py > "$report" 2>&1
  code=$?
  if [ $tool = racecheck ] && [ $code = 9 ]; then
    all=$(grep -c "access at .* in " "$report")
    others=$(grep "access at .* in " "$report" | grep -cvE "hopper_kernel.py:($dispatch)( |$)")
    echo "racecheck: $others accesses outside of Triton's dispatch, $((all - others)) inside"
    [ "$others" = 0 ] && continue
  fi
  echo "$tool: exit $code; $(grep "SUMMARY" "$report" | tail -1)"
  [ $code = 0 ] || { failed=1; grep -v "Saved host\|Host Frame" "$report" | head -25 | cut -c1-200; }
done
exit $failed
