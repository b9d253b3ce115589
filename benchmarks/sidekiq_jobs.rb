# Sidekiq as a peer of `messages` and `fan_out`: a job that does nothing, enqueued a thousand at a time.
#
#   sidekiq -r benchmarks/sidekiq_jobs.rb …          works on the jobs
#   ruby benchmarks/sidekiq_jobs.rb QUEUE COUNT      enqueues COUNT jobs, and prints the seconds
#
# Both read REDIS_URL.

require "sidekiq"

class Nothing
  include Sidekiq::Worker
  sidekiq_options retry: 25, backtrace: false

  def perform(_project)
  end
end

def push(queue, count)
  (1..count).each_slice(1000) do |projects|
    Sidekiq::Client.push_bulk("class" => Nothing, "queue" => queue, "args" => projects.map { |project| [project] })
  end
end

if $PROGRAM_NAME == __FILE__
  queue, count = ARGV
  Sidekiq.logger.level = Logger::ERROR
  # The first call, with its connection, is not measured.
  push("warm", 1000)
  began = Process.clock_gettime(Process::CLOCK_MONOTONIC)
  push(queue, Integer(count))
  puts Process.clock_gettime(Process::CLOCK_MONOTONIC) - began
end
